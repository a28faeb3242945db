"""The OpenAI surface that router and replica will share: types, errors, SSE, templates, tokenizing (planned)."""
