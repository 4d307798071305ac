"""`doctor` looks at a machine, `preflight` runs the whole course, `bench` measures what it promises about speed."""
