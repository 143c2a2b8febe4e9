"""Shows the runs of a folder or bucket in a browser while they train. It only reads them and never writes."""
