"""What is measured, one module a part: each has ``run(settings)``, which yields rows of plain data."""
