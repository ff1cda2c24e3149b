"""A Pyro model seen as records: its plate, its rows, one record's term, structural checks."""
