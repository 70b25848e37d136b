"""Other libraries' models and harnesses, served by this one. A file knows one library and imports it when it runs."""
