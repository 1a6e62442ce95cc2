"""Jobs a second: scenario.py measures, tables.py shows what was found."""
