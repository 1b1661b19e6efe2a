"""What a user does with a run or an archive: one file a verb, its report beside it."""
