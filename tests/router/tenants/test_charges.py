"""A request is charged when it comes, when its prompt is known and when its answer ends; refusals say what to do."""

import pytest

from api.errors import ApiError
from router.tenants.charges import Account, Charge, account_of, duration
from router.tenants.keys import Key, digest_of
from router.tenants.limits import DAY_S, NOTHING, Use
from router.tenants.shared_limits import SharedLimits

NOON_S = 20_000 * DAY_S + DAY_S / 2


class Clock:
    wall_s = NOON_S

    def __call__(self) -> float:
        return self.wall_s


def account(wall: Clock | None = None, **limits: float) -> Account:
    key = Key(name="a", digest=digest_of("a"), **limits)  # type: ignore[arg-type]
    found = account_of(key, SharedLimits(), wall or Clock())
    assert found is not None
    return found


def refusal_of(one: Account | Charge, use: Use = NOTHING, now_s: float = 0.0) -> ApiError:
    asked = (lambda: one.take_prompt(use, now_s)) if isinstance(one, Charge) else (lambda: one.admit(now_s))
    with pytest.raises(ApiError) as caught:
        asked()
    error = caught.value
    assert (error.status, error.code, error.type) == (429, "rate_limit_exceeded", "rate_limit_error")
    return error


def headers(charge: Charge, now_s: float = 0.0) -> dict[str, str]:
    return {name.removeprefix("x-ratelimit-"): value for name, value in charge.headers(now_s)}


def test_a_key_without_limits_has_no_account() -> None:
    assert account_of(Key(name="a", digest=digest_of("a")), SharedLimits()) is None


def test_cached_tokens_count_by_their_weight() -> None:
    charge = account(tokens_per_minute=1000).admit(0.0)
    charge.take_prompt(Use(computed=100, cached=500), 0.0)
    assert headers(charge) == {"limit-tokens": "1000", "remaining-tokens": "850", "reset-tokens": "9s"}
    charge.headers(0.0, Use(computed=550, cached=50, generated=40))  # less was cached than predicted
    assert headers(charge)["remaining-tokens"] == "405"
    charge.headers(0.0, Use(computed=550, cached=50, generated=60))
    assert headers(charge)["remaining-tokens"] == "385"
    assert headers(charge, 6.0)["remaining-tokens"] == "485"


def test_a_prompt_that_is_larger_than_what_is_left_costs_nothing() -> None:
    one = account(tokens_per_minute=600, requests_per_day=10)
    one.admit(0.0).take_prompt(Use(computed=500), 0.0)
    charge = one.admit(0.0)
    error = refusal_of(charge, Use(computed=300))
    assert error.param == "tokens_per_minute" and error.headers == {"Retry-After": "20"}
    assert error.message == (
        "this API key may use 600 tokens a minute (tokens_per_minute); 500 of 600 are used, "
        "and this prompt counts as 300; try again in 20s"
    )
    assert headers(charge)["remaining-tokens"] == "100"
    assert headers(charge)["remaining-requests"] == "9"
    one.admit(20.0).take_prompt(Use(computed=300), 20.0)


def test_a_prompt_that_is_larger_than_the_limit_is_not_to_be_tried_again() -> None:
    error = refusal_of(account(tokens_per_minute=600).admit(0.0), Use(computed=601))
    assert error.headers == {"x-should-retry": "false"}
    assert "this prompt alone counts as 601; shorten it" in error.message


def test_an_overdraft_is_paid_before_the_next_request() -> None:
    one = account(generated_tokens_per_minute=60)
    first = one.admit(0.0)
    first.headers(0.0, Use(generated=90))
    assert headers(first)["remaining-tokens"] == "0"
    error = refusal_of(one)
    assert (error.param, error.headers["Retry-After"]) == ("generated_tokens_per_minute", "31")
    assert error.headers["x-ratelimit-remaining-tokens"] == "0"
    one.admit(31.0)


def test_computed_cached_and_generated_tokens_have_limits_of_their_own() -> None:
    one = account(computed_tokens_per_minute=100, cached_tokens_per_minute=1000, generated_tokens_per_minute=50)
    charge = one.admit(0.0)
    charge.take_prompt(Use(computed=90, cached=900), 0.0)
    assert refusal_of(one.admit(0.0), Use(computed=20, cached=20)).param == "computed_tokens_per_minute"
    assert refusal_of(one.admit(0.0), Use(computed=5, cached=200)).param == "cached_tokens_per_minute"
    one.admit(0.0).take_prompt(Use(computed=5, cached=20), 0.0)


def test_the_days_budget_ends_at_midnight() -> None:
    wall = Clock()
    one = account(wall, requests_per_day=1, tokens_per_day=1000)
    charge = one.admit(0.0)
    assert headers(charge)["reset-requests"] == "12h0m0s"
    error = refusal_of(one)
    assert (error.param, error.headers["Retry-After"], error.headers["x-should-retry"]) == (
        "requests_per_day",
        str(DAY_S // 2),
        "false",
    )
    assert "this API key may use 1 requests a day (UTC) (requests_per_day); 1 of 1 are used" in error.message
    charge.take_prompt(Use(computed=800), 0.0)
    wall.wall_s += DAY_S / 2
    charge.headers(0.0, Use(computed=100, generated=30))  # what was charged yesterday is not given back today
    assert headers(one.admit(0.0))["remaining-tokens"] == "970"


def test_of_several_limits_the_headers_tell_of_the_one_with_least_left() -> None:
    charge = account(requests_per_minute=600, requests_per_day=50, tokens_per_minute=500, tokens_per_day=9000).admit(
        0.0
    )
    found = headers(charge)
    assert (found["limit-requests"], found["remaining-requests"]) == ("50", "49")
    assert (found["limit-tokens"], found["remaining-tokens"]) == ("500", "500")
    assert charge.lines(0.0).startswith(b"x-ratelimit-limit-requests: 50\r\nx-ratelimit-remaining-requests: 49\r\n")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        *(
            (0.0, "0ms"),
            (-1.0, "0ms"),
            (0.0001, "1ms"),
            (0.02, "20ms"),
            (0.9995, "1s"),
            (1.5, "1.5s"),
            (59.999, "59.999s"),
        ),
        *((60.0, "1m0s"), (72.2, "1m13s"), (360.0, "6m0s"), (3723.0, "1h2m3s"), (86_400.0, "24h0m0s")),
    ],
)
def test_times_are_written_as_openai_writes_them(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
