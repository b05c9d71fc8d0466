"""FLUX.1 dev, schnell and Kontext: pictures from text, from pictures, and by instruction."""
