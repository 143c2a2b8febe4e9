"""The densities that come with the package, and the script that computed them."""
