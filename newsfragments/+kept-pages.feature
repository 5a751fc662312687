A request with a prompt of megabytes, such as an image, costs a third of the CPU: its memory is kept for some seconds for the next one.
