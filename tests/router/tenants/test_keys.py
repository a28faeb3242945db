"""API keys: the format of a key file, look-ups, and separate caches."""

import hashlib

import pytest

from router.tenants.keys import Key, digest_of, find, keys_from_options, parse_keys

FILE = """
[keys.alice]
key = "alice-secret"
requests_per_minute = 60
max_in_flight = 4

[keys.bob]
key_sha256 = "{digest}"
group = "team"

[keys.carol]
key = "carol-secret"
group = "team"

[keys.open]
key = "open-secret"
salt = false

[keys.root]
key = "root-secret"
admin = true
"""
TEXT = FILE.format(digest=hashlib.sha256(b"bob-secret").hexdigest())


def keys(text: str = TEXT) -> dict[str, Key]:
    return {key.name: key for key in parse_keys("keys.toml", text)}


def test_a_key_is_found_by_what_the_client_sends_written_out_or_as_its_digest() -> None:
    found = {key.digest: key for key in keys().values()}
    for name in ("alice", "bob", "carol", "open", "root"):
        key = find(found, f"{name}-secret".encode())
        assert key is not None and key.name == name
    assert find(found, b"alice-secreT") is None
    assert find(found, b"") is None
    assert find(found, b"\xff" * 10_000) is None
    assert len(found) == 5


def test_the_keys_themselves_are_not_kept() -> None:
    assert "secret" not in repr(list(keys().values()))
    assert "secret" not in repr(keys_from_options(["my-secret"], "admin-secret"))


def test_limits_are_those_of_the_file() -> None:
    alice, root = keys()["alice"], keys()["root"]
    assert (alice.requests_per_minute, alice.max_in_flight, alice.admin) == (60, 4, False)
    assert (root.requests_per_minute, root.max_in_flight, root.admin) == (None, None, True)


def test_shares_are_those_of_the_file() -> None:
    text = "[keys.a]\nkey = 'a'\nweight = 4\n[keys.b]\nkey = 'b'\ntenant_header = 'X-Tenant'"
    a, b = parse_keys("keys.toml", text)
    assert (a.weight, a.tenant_header) == (4.0, None)
    assert (b.weight, b.tenant_header) == (1.0, b"x-tenant")


def test_salts_keep_keys_apart_and_groups_together() -> None:
    made = keys()
    assert made["bob"].salt == made["carol"].salt
    assert made["open"].salt is None
    assert len({made[name].salt for name in ("alice", "bob", "root")}) == 3
    assert all(len(key.salt) == 32 for key in made.values() if key.salt)


def test_salts_are_the_same_on_every_router_and_after_every_restart() -> None:
    assert keys() == keys()
    assert keys()["alice"].salt == "fdaaae0729f36e86bbc847f360a1d2f8"  # others would start every cache afresh


def test_a_salt_cannot_be_known_without_the_key() -> None:
    other = keys(TEXT.replace("alice-secret", "another"))
    assert other["alice"].salt != keys()["alice"].salt
    assert other["bob"].salt == keys()["bob"].salt


def test_with_a_secret_of_the_file_salts_outlive_their_keys() -> None:
    before, after = keys(f'salt_secret = "s"\n{TEXT}'), keys('salt_secret = "s"\n' + TEXT.replace("-secret", "-new"))
    assert before["alice"].salt == after["alice"].salt
    assert before["carol"].salt == after["carol"].salt
    assert before["alice"].salt != keys()["alice"].salt


def test_the_clients_own_salt_divides_the_keys_cache_further() -> None:
    alice, bob, open_ = (keys()[name] for name in ("alice", "bob", "open"))
    assert alice.salted(None) == alice.salt
    assert len({alice.salted(None), alice.salted("x"), alice.salted("y"), bob.salted("x"), "x"}) == 5
    assert (open_.salted(None), open_.salted("x")) == (None, "x")


def test_a_key_may_use_its_class_and_those_below() -> None:
    text = """
    [classes.interactive]
    first_token_s = 1.5
    [keys.a]
    key = 'a'
    class = 'interactive'
    weight = 2
    [keys.b]
    key = 'b'
    [keys.c]
    key = 'c'
    class = 'batch'
    """
    a, b, c = parse_keys("keys.toml", text)
    assert [[one.name for one in key.classes] for key in (a, b, c)] == [
        ["interactive", "standard", "batch"],
        ["standard", "batch"],
        ["batch"],
    ]
    assert [one.first_token_s for one in a.classes] == [1.5, 10.0, 120.0]
    assert (a.weight, b.weight, c.weight) == (8.0, 1.0, 0.25)


def test_without_a_class_in_the_file_there_are_none() -> None:
    [key] = parse_keys("keys.toml", "[keys.a]\nkey = 'a'")
    assert key.classes == ()
    [key] = parse_keys("keys.toml", "[classes.batch]\n[keys.a]\nkey = 'a'")
    assert [one.name for one in key.classes] == ["standard", "batch"]


def test_keys_of_the_command_line_have_names_and_salts_and_no_limits() -> None:
    first, second, admin = keys_from_options(["a", "b", "a"], "c")
    assert (first.name, second.name, admin.name) == ("key-1", "key-2", "admin")
    assert (first.admin, second.admin, admin.admin) == (False, False, True)
    assert len({first.salt, second.salt, admin.salt, None}) == 4
    assert keys_from_options(["b"], None)[0].salt == second.salt
    assert keys_from_options([], None) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = ", "keys.toml is not TOML: Invalid value"),
        ("", "keys.toml: the file: object missing required field `keys`"),
        ("[key.a]\nkey = 'a'", "keys.toml: the file: 'key' is not known; did you mean 'keys'?"),
        ("[keys.a]", "keys.toml: keys.a needs either key or key_sha256"),
        (f"[keys.a]\nkey = 's3cret'\nkey_sha256 = '{'0' * 64}'", "keys.a needs either key or key_sha256"),
        ("[keys.a]\nkey = ''", "the key of keys.a cannot be sent in a header; use visible ASCII"),
        ("[keys.a]\nkey = 's3cret é'", "the key of keys.a cannot be sent in a header"),
        ("[keys.a]\nkey = 's3cret s3cret'", "the key of keys.a cannot be sent in a header"),
        ("[keys.a]\nkey_sha256 = 's3cret'", "key_sha256 of keys.a is not a SHA-256; write the 64 digits"),
        ("[keys.a]\nkey = 5", "keys.NAME.key: expected `str | null`, got `int`"),
        ("[keys.a]\nkey = 'a'\nrequest_per_minute = 5", "keys.NAME: 'request_per_minute' is not known; did you mean"),
        ("[keys.a]\nkey = 'a'\ncolour = 5", "keys.NAME: 'colour' is not known; the keys there are key, key_sha256"),
        ("[keys.a]\nkey = 'a'\nrequests_per_minute = 0", "requests_per_minute of keys.a is 0"),
        ("[keys.a]\nkey = 'a'\nrequests_per_minute = nan", "requests_per_minute of keys.a is nan"),
        ("[keys.a]\nkey = 'a'\nmax_in_flight = -1", "max_in_flight of keys.a is -1; write 1 or more"),
        ("[keys.a]\nkey = 'a'\ntokens_per_minute = 0.5", "tokens_per_minute of keys.a is 0.5; write 1 or more"),
        ("[keys.a]\nkey = 'a'\ntokens_per_day = inf", "tokens_per_day of keys.a is inf; write 1 or more"),
        ("[keys.a]\nkey = 'a'\ntokens_per_day = 9\ncached_token_weight = 2", "cached_token_weight of keys.a is 2"),
        ("[keys.a]\nkey = 'a'\nweight = 0", "weight of keys.a is 0.0; write a number above 0, at most 1000"),
        ("[keys.a]\nkey = 'a'\nweight = 1e9", "at most 1000"),
        ("[keys.a]\nkey = 'a'\ntenant_header = 'x tenant'", "tenant_header of keys.a is 'x tenant'; write the name of"),
        ("[keys.a]\nkey = 'a'\nclass = 'flex'", "class of keys.a is 'flex'; write interactive, standard or batch"),
        ("[classes.flex]\n[keys.a]\nkey = 'a'", "classes.flex is no class; write interactive, standard or batch"),
        ("[classes.batch]\nfirst_token = 5\n[keys.a]\nkey = 'a'", "did you mean 'first_token_s'?"),
        ("[classes.batch]\nfirst_token_s = 0\n[keys.a]\nkey = 'a'", "first_token_s of classes.batch is 0.0"),
        ("[classes.batch]\nfirst_token_s = 1\n[keys.a]\nkey = 'a'", "less than the 10 of classes.standard, a higher"),
        ("[classes.batch]\nweight = nan\n[keys.a]\nkey = 'a'", "weight of classes.batch is nan; write a number above"),
        ("[keys.a]\nkey = 'a'\nclas = 'batch'", "keys.NAME: 'clas' is not known; did you mean 'class'?"),
        ("[keys.a]\nkey = 'a'\ncached_token_weight = 0.5", "but no tokens_per_minute or tokens_per_day"),
        ("[keys.a]\nkey = 'a'\ngroup = 'g'\nsalt = false", "keys.a has the group 'g' and salt = false"),
        ("[keys.a]\nkey = 's3cret'\n[keys.b]\nkey = 's3cret'", "keys.a and keys.b are the same key"),
    ],
)
def test_an_error_names_the_table_and_never_the_key(text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_keys("keys.toml", text)
    assert said in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_a_digest_is_that_of_sha256sum() -> None:
    assert digest_of("bob-secret").hex() == hashlib.sha256(b"bob-secret").hexdigest()
