"""The course as files: which lessons there are, notebook and script as one, what attendees get."""
