"""What requests of several verbs share: fields, values as people write them, and how reports are shown."""
