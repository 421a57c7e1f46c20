"""Data of the programs: sources that options name, mixtures, streams and tasks."""
