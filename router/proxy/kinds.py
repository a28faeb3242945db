"""The classes of the requests that go to replicas: those that this router forwards itself, unless others are named."""

from typing import NamedTuple

from router.proxy.conversing import Conversing, OfResponse
from router.proxy.forwarding import Forwarding
from router.proxy.generation import Generation
from router.proxy.prompted_request import PromptedRequest


class Kinds(NamedTuple):
    generation: type[PromptedRequest] = Generation
    forwarding: type[Forwarding] = Forwarding
    conversing: type[Conversing] = Conversing
    of_response: type[OfResponse] = OfResponse


OUR_OWN = Kinds()
