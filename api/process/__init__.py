"""Programs as processes: settings, children, memory, and folders of their own."""
