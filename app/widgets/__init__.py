"""What more than one page shows."""
