"""Shows results: tables on a terminal, HTML pages, pictures in notebooks."""
