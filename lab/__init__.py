"""Tools that measure and advise: size; simulate, bench, analyze, doctor."""
