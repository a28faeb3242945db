import pytest

from api.tokens.tokenizer import ByteTokenizer, Tokenizer
from tests.api.tokenizers import KINDS, loaded


@pytest.fixture(scope="session", params=["bytes", *KINDS])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Every kind of tokenizer."""
    if request.param == "bytes":
        return ByteTokenizer()
    return loaded(request.param, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return loaded("byte_level", tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return loaded("sentencepiece", tmp_path_factory.getbasetemp())
