"""Works out how the events of one trace belong together: nesting, event tree, links, attribution and calls."""
