"""What becomes of a history: what stays of it, what is released, what is sent on."""
