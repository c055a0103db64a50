"""Lab 09: a loader of shards that resumes on another number of ranks."""
