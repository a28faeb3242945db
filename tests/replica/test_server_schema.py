"""The OpenAPI document names the served model and every error; tests.chaos.test_schema holds it to its word."""

from tests.replica.serving import MODEL, Replica


def test_the_document_names_the_model_that_is_served(served: Replica) -> None:
    document = served.get("/openapi.json").json
    for request in ("CompletionRequest", "ChatRequest"):
        assert document["components"]["schemas"][request]["properties"]["model"] == {"enum": [MODEL]}


def test_every_path_documents_its_errors(served: Replica) -> None:
    paths = served.get("/openapi.json").json["paths"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        responses = paths[path]["post"]["responses"]
        assert set(responses) >= {"200", "400", "401", "404", "413", "429", "500", "503"}
        assert "text/event-stream" in responses["200"]["content"]
        assert paths[path]["post"]["requestBody"]["required"]
