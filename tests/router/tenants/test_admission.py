"""Admission: keys, limits, administration, sizes and names of requests."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from api.errors import ApiError
from api.http.routes import Role
from router.process.front import watched_keys
from router.tenants.admission import MAX_HEADERS, Admission, Admitted, Headers, is_local
from router.tenants.keys import Key, digest_of, keys_from_options

CLIENT, ADMINISTRATOR, READER = Role.CLIENT, Role.ADMINISTRATOR, Role.READER
HOST = (b"host", b"127.0.0.1:8000")
REMOTE = ("10.0.0.9", 40000)
LOCAL = ("127.0.0.1", 40000)


def key(name: str, *, admin: bool = False, rpm: float | None = None, most: int | None = None) -> Key:
    digest = digest_of(f"{name}-key")
    return Key(name=name, digest=digest, salt=name, admin=admin, requests_per_minute=rpm, max_in_flight=most)


def bearing(name: str) -> Headers:
    return [HOST, (b"authorization", f"Bearer {name}-key".encode())]


def admit(
    admission: Admission,
    headers: Headers,
    who: Role,
    client: tuple[str, int] | None,
    now_s: float,
    *,
    http_version: str = "1.1",
) -> Admitted:
    scope = {"headers": headers, "client": client, "path": "this", "http_version": http_version}
    return admission.admit(scope, who, now_s)


def refused(
    admission: Admission,
    headers: Headers,
    who: Role = CLIENT,
    client: tuple[str, int] | None = REMOTE,
    now_s: float = 0.0,
) -> ApiError:
    with pytest.raises(ApiError) as caught:
        admit(admission, headers, who, client, now_s)
    admission.check()
    return caught.value


# ---- keys


def test_without_keys_any_client_may_ask_with_any_key() -> None:
    admission = Admission()
    for headers in ([HOST], bearing("any"), [(b"authorization", b"Basic x")]):
        admitted = admit(admission, headers, CLIENT, REMOTE, 0.0)
        assert admitted.key is None
        assert admitted.cache_salt("mine") == "mine"
        admission.release(admitted)


@pytest.mark.parametrize(
    ("headers", "shows"),
    [
        ([HOST], False),
        (bearing("other"), False),
        ([(b"authorization", b"Basic a-key")], False),
        (bearing("a"), True),
        ([*bearing("a"), *bearing("other")], True),
    ],
)
def test_a_key_of_ours_is_known_where_none_is_demanded(headers: Headers, shows: bool) -> None:
    admitted = admit(Admission([key("a", admin=True)]), headers, CLIENT, REMOTE, 0.0)
    assert (admitted.key, admitted.shows_key) == (None, shows)
    assert not admit(Admission(), headers, CLIENT, REMOTE, 0.0).shows_key


def test_with_keys_a_request_has_to_bring_one() -> None:
    admission = Admission([key("a"), key("b")], demand_key=True)
    admitted = admit(admission, bearing("b"), CLIENT, REMOTE, 0.0)
    assert admitted.key is not None and admitted.key.name == "b"
    assert (admitted.cache_salt(None), admitted.cache_salt("mine")) == ("b", "b.mine")


@pytest.mark.parametrize("scheme", [b"Bearer ", b"bearer ", b"BEARER   "])
def test_the_scheme_is_written_in_any_case(scheme: bytes) -> None:
    admission = Admission([key("a")], demand_key=True)
    assert admit(admission, [(b"authorization", scheme + b"a-key ")], CLIENT, REMOTE, 0.0).key is not None


# ---- administration


def test_without_an_administrators_key_only_this_machine_administers() -> None:
    admission = Admission()
    for host in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"):
        admit(admission, [HOST], ADMINISTRATOR, (host, 40000), 0.0)
    admit(admission, [HOST], ADMINISTRATOR, None, 0.0)
    error = refused(admission, [HOST], ADMINISTRATOR, REMOTE)
    assert (error.status, error.code) == (403, "admin_key_required")
    assert "start it with --admin-key" in error.message
    guarded = Admission([key("a")], demand_key=True)
    admit(guarded, bearing("a"), ADMINISTRATOR, LOCAL, 0.0)
    assert refused(guarded, bearing("a"), ADMINISTRATOR, REMOTE).status == 403
    assert refused(guarded, [HOST], ADMINISTRATOR, LOCAL).status == 401


def test_a_key_is_known_until_it_is_taken_away() -> None:
    admission = Admission([key("a"), key("b")])
    admission.use([key("a")])
    assert (admission.knows(key("a"), admin=False), admission.knows(key("b"), admin=False)) == (True, False)


@pytest.mark.parametrize("admin", [True, False])
def test_another_key_of_the_same_name_is_not_the_one_that_was_let_in(admin: bool) -> None:
    ours = key("root", admin=admin)
    rotated = replace(ours, digest=digest_of("another"))
    other_rank = replace(ours, admin=not admin)
    for others in ([rotated], [other_rank], []):
        admission = Admission([ours, key("a")])
        assert admission.knows(ours, admin=admin)
        admission.use([*others, key("a")])
        assert not admission.knows(ours, admin=admin), others


def test_the_first_admin_key_ends_keyless_administration() -> None:
    admission = Admission([key("a")])
    assert admission.knows(None, admin=True) and admission.knows(key("a"), admin=True)
    admission.use([key("a"), key("root", admin=True)])
    assert not admission.knows(None, admin=True) and not admission.knows(key("a"), admin=True)
    assert admission.knows(None, admin=False) and admission.knows(key("a"), admin=False)


@pytest.mark.parametrize(
    "headers",
    [
        [HOST, (b"x-forwarded-for", b"10.0.0.9")],
        [HOST, (b"forwarded", b"for=10.0.0.9")],
        [HOST, (b"via", b"1.1 proxy")],
        [(b"host", b"evil.example:8000")],
        [(b"host", b"127.0.0.1.evil.example")],
        [HOST, (b"origin", b"https://evil.example")],
        [HOST, (b"origin", b"null")],
        [(b"host", b"evil.example"), HOST],
        [],
    ],
)
def test_proxies_and_pages_of_others_are_not_this_machine(headers: Headers) -> None:
    assert not is_local(headers, "127.0.0.1")


@pytest.mark.parametrize("host", [b"localhost", b"localhost:8000", b"127.0.0.1", b"[::1]:8000"])
def test_pages_of_the_router_itself_are(host: bytes) -> None:
    assert is_local([(b"host", host), (b"origin", b"http://" + host)], "127.0.0.1")


# ---- limits


def test_a_key_has_so_many_requests_in_flight_and_gets_them_back() -> None:
    admission = Admission([key("a", most=2), key("b", most=1)], demand_key=True)
    first, _ = (admit(admission, bearing("a"), CLIENT, REMOTE, 0.0) for _ in range(2))
    error = refused(admission, bearing("a"))
    assert (error.status, error.code, error.type) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert error.headers["Retry-After"] == "1"
    admit(admission, bearing("b"), CLIENT, REMOTE, 0.0)
    admission.release(first)
    admission.release(first)  # twice is once
    assert admission.in_flight() == {"a": 1, "b": 1}
    admit(admission, bearing("a"), CLIENT, REMOTE, 0.0)
    assert refused(admission, bearing("a")).status == 429


def test_a_refused_request_takes_no_place() -> None:
    admission = Admission([key("a", rpm=6, most=1)], demand_key=True)
    admission.release(admit(admission, bearing("a"), CLIENT, REMOTE, 0.0))
    error = refused(admission, bearing("a"), now_s=2.5)
    assert (error.status, error.headers["Retry-After"]) == (429, "8")
    assert "6 requests a minute (requests_per_minute); 1 of 1 are used; try again in 7.5s" in error.message
    assert admission.in_flight() == {}
    admission.release(admit(admission, bearing("a"), CLIENT, REMOTE, 10.0))


def test_a_key_may_send_so_many_requests_a_minute() -> None:
    admission = Admission([key("a", rpm=60)], demand_key=True)

    def sent(now_s: float) -> int:
        count = 0
        while True:
            try:
                admission.release(admit(admission, bearing("a"), CLIENT, REMOTE, now_s))
            except ApiError:
                return count
            count += 1

    assert sent(100.0) == 10  # a sixth at once
    assert [sent(100.0 + second) for second in range(1, 50)] == [1] * 49
    assert sent(1000.0) == 10


def test_what_was_used_outlives_a_change_of_the_keys() -> None:
    admission = Admission([key("a", rpm=6, most=2), key("b")], demand_key=True)
    running = admit(admission, bearing("a"), CLIENT, REMOTE, 0.0)
    admission.use([key("a", rpm=12, most=2), key("c")])
    assert admission.in_flight() == {"a": 1}
    assert refused(admission, bearing("a"), now_s=1.0).status == 429
    assert refused(admission, bearing("b")).status == 401
    admission.release(running)
    assert admission.in_flight() == {}


# ---- headers and names


def test_headers_have_limits() -> None:
    admission = Admission()
    many = [(b"x", b"y")] * MAX_HEADERS
    admit(admission, many, CLIENT, REMOTE, 0.0)
    for headers in ([*many, HOST], [(b"x", b"y" * 32 * 1024)]):
        for who in (CLIENT, Role.ANYONE):
            error = refused(admission, headers, who)
            assert (error.status, error.code) == (431, "headers_too_large")


def test_a_sane_request_id_is_kept_and_others_are_made() -> None:
    admission = Admission()

    def request_id(given: bytes) -> str:
        return admit(admission, [(b"x-request-id", given)], CLIENT, REMOTE, 0.0).request_id

    for sane in (b"abc-123", b"!" * 128, b"{9f0}"):
        assert request_id(sane) == sane.decode()
    made = [request_id(bad) for bad in (b"", b"a b", b"a\r\nset-cookie: x", b"\xc3\xa9", b"x" * 129, b"\x7f")]
    assert len(set(made)) == len(made)
    assert all(each.startswith("req-") and len(each) < 40 for each in made)
    assert admit(Admission(), [], CLIENT, None, 0.0).request_id != admit(Admission(), [], CLIENT, None, 0.0).request_id


# ---- the file


def test_keys_of_a_file_change_while_the_router_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[keys.a]\nkey = 'a-key'")
    watched = watched_keys(str(path), beside=keys_from_options(["option-key"], None))

    def names() -> list[str] | None:
        found = watched.look()
        return None if found is None else [key.name for key in found]

    assert names() == ["key-1", "a"]
    assert names() is None
    path.write_text("[keys.b]\nkey = 'b-key'\n[keys.c]\nkey = 'c-key'")
    assert [names(), names()] == [None, ["key-1", "b", "c"]]
    for broken in ("[keys.b]\nkey = ", "[keys.key-1]\nkey = 'longer'"):
        path.write_text(broken)
        assert [names(), names()] == [None, None]
        assert watched.problem is not None and str(path) in watched.problem
    path.unlink()
    assert names() is None
    assert "keeping the previous keys" in caplog.text
    path.write_text("[keys.d]\nkey = 'd-key'")
    assert [names(), names()] == [None, ["key-1", "d"]]
    assert watched.problem is None and f"{path} can be used again" in caplog.text
