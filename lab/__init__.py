"""Tools that measure and advise: size; simulate, bench, analyze and doctor are planned."""
