// The stream of events: state, decisions, history. What is not heard for a while is stale,
// and the page says so, since old figures that look new mislead.

const STALE_AFTER_MS = 12_000; // the history alone speaks every five seconds
const RETRY_MS = [500, 1000, 2000, 4000, 8000];

export class Link {
  // `on`: functions by event name: state, decisions, history, opened, status(name, silentMs).
  constructor(on) {
    this.on = on;
    this.failures = 0;
    this.heardAt = performance.now();
    this.source = null;
    this.status = "connecting";
    setInterval(() => this.look(), 500);
    document.addEventListener("visibilitychange", () => this.look());
    this.open();
  }

  open() {
    clearTimeout(this.retry);
    this.retry = null;
    const source = (this.source = new EventSource("/api/events"));
    source.onopen = () => {
      this.failures = 0;
      this.heard();
      this.on.opened();
    };
    source.onmessage = (event) => this.take("state", event);
    source.addEventListener("decisions", (event) => this.take("decisions", event));
    source.addEventListener("history", (event) => this.take("history", event));
    source.onerror = () => {
      // The browser tries again by itself, but gives up at any answer that is no stream.
      source.close();
      if (this.source === source) this.again();
    };
  }

  async again() {
    if (this.retry) return;
    const wait = RETRY_MS[Math.min(this.failures, RETRY_MS.length - 1)];
    this.failures += 1;
    this.look();
    this.retry = setTimeout(async () => {
      try {
        const answer = await fetch("/livez", { cache: "no-store" });
        const mayI = answer.ok && (await fetch("/api/state", { method: "HEAD", cache: "no-store" }));
        if (mayI && (mayI.status === 401 || mayI.status === 429)) return location.reload(); // the form asks for the token
      } catch {
        this.retry = null;
        return this.again();
      }
      this.open();
    }, wait);
  }

  take(name, event) {
    this.heard();
    this.on[name](JSON.parse(event.data));
  }

  heard() {
    this.heardAt = performance.now();
    this.look();
  }

  look() {
    const silent = performance.now() - this.heardAt;
    const open = this.source?.readyState === EventSource.OPEN;
    if (open && silent > 2 * STALE_AFTER_MS) {
      this.source.close(); // a connection that died without a word
      this.again();
    }
    const status = open && silent <= STALE_AFTER_MS ? "live" : this.status === "connecting" && !this.failures ? "connecting" : "stale";
    this.status = status;
    this.on.status(status, silent);
  }
}
