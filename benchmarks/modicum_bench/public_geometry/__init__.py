"""What a public geometry and releases of class sums give: settings from the proxy, then every cell on the test."""
