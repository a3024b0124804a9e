"""Models that use `pallas_fa`, and the program that trains them: `python -m models.train`. Not part of the package."""
