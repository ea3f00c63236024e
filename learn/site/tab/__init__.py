"""The page that runs the specification in a browser tab: its parts, and the program that packs them."""
