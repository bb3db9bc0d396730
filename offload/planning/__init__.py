"""Which tree pays: costs of a step, acceptance, search, profiles. No torch."""
