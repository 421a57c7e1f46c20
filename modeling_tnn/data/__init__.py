"""Data: texts for language models, and tasks for classifiers."""
