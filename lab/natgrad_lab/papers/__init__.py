"""One folder per paper: its runs, and the page that tells what came out beside what the paper printed."""
