`tail_price` of `expected-ttft` is 0.08 by default (was 0.06): the longest waits for a first token are a fiftieth shorter, as is
the mean where it was worst beside simple prediction; end-to-end times are a few thousandths longer.
