"""The OpenAI surface that router and replica share: types, errors, SSE, templates, tokenizing; without torch."""
