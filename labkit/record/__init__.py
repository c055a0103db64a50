"""Reading what a run folder holds. A folder may come from anybody: files are opened below the folder only, and values are checked once."""
