"""Tools that measure and advise: simulate, bench, analyze, doctor, size (planned)."""
