"""The five services, one folder each, and how they are launched. They never import each other."""
