"""Long work in processes of its own, which the pages only look at."""
