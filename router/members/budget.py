"""Bytes that all requests together may hold."""


class Budget:
    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    def take(self, more_bytes: int) -> bool:
        """Reserve more bytes; return False and reserve nothing if that exceeds the limit."""
        if self.held_bytes + more_bytes > self.limit_bytes:
            return False
        self.held_bytes += more_bytes
        return True

    def give_back(self, held_bytes: int) -> None:
        assert held_bytes <= self.held_bytes, f"{held_bytes} bytes are given back, {self.held_bytes} are held"
        self.held_bytes -= held_bytes
