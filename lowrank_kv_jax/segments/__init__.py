"""Parts of a cache whose partials are merged."""
