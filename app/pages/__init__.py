"""A folder a page: its view, and the forms and figures that only it has."""
