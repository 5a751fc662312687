An event of a stream that adds a piece of text and says nothing else costs the gateway's own Python a third less.
