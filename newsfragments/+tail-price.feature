`tail_price` of `expected-ttft` is 0.1 by default (was 0.06): the longest waits for a first token are some three hundredths
shorter, and so is the mean where it was worst beside simple prediction; end-to-end times are half a hundredth longer.
