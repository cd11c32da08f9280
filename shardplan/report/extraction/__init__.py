"""What is shown of an extraction run: tables, plots, pages."""
