// The last ten minutes: the gateway's samples, kept as they come.

const KEPT = 120; // as the gateway

export class Past {
  constructor() {
    this.samples = [];
  }

  clear() {
    this.samples = [];
  }

  add(items) {
    this.samples = [...this.samples, ...items].slice(-KEPT);
  }

  // What `pick` gives for each sample; null is a gap.
  series(pick) {
    return this.samples.map((sample) => pick(sample) ?? null);
  }

  // Sum over the last `seconds`.
  sum(pick, seconds = Infinity) {
    return this.within(seconds).reduce((total, sample) => total + (pick(sample) ?? 0), 0);
  }

  // The same for samples' counts by name: pairs, the largest first.
  counts(pick, seconds = Infinity) {
    const found = new Map();
    for (const sample of this.within(seconds)) {
      for (const [name, count] of Object.entries(pick(sample) ?? {})) found.set(name, (found.get(name) ?? 0) + count);
    }
    return [...found].sort((one, other) => other[1] - one[1]);
  }

  rate(pick, seconds) {
    const samples = this.within(seconds);
    const span = samples.reduce((total, sample) => total + sample.every_s, 0);
    return span ? samples.reduce((total, sample) => total + (pick(sample) ?? 0), 0) / span : null;
  }

  // Mean time to first token, weighted by requests: of one backend, or of all.
  ttft(id, seconds) {
    let total = 0;
    let count = 0;
    for (const sample of this.within(seconds)) {
      for (const [name, own] of Object.entries(sample.backends)) {
        if (own.ttft_s != null && (id == null || name === id)) {
          total += own.ttft_s * own.requests;
          count += own.requests;
        }
      }
    }
    return count ? total / count : null;
  }

  // Share of the requests of the last `seconds` by backend; null while there were none.
  shares(seconds = Infinity) {
    const counts = new Map();
    let all = 0;
    for (const sample of this.within(seconds)) {
      for (const [name, own] of Object.entries(sample.backends)) {
        counts.set(name, (counts.get(name) ?? 0) + own.requests);
        all += own.requests;
      }
    }
    return all ? new Map([...counts].map(([name, count]) => [name, count / all])) : null;
  }

  within(seconds) {
    const last = this.samples.at(-1);
    return last ? this.samples.filter((sample) => sample.at > last.at - seconds) : [];
  }
}
