// Figures as people read them: two or three digits, and a unit.

export function seconds(value) {
  if (value == null) return "–";
  if (value < 0.0095) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 99.5) return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
  return `${Math.round(value)} s`;
}

export function figure(value, digits = 1) {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(0)}k`;
  if (size >= 1e3) return `${(value / 1e3).toFixed(1)}k`;
  if (Number.isInteger(value)) return String(value);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? Math.min(1, digits) : digits);
}

export function percent(share) {
  if (share == null) return "–";
  return share > 0 && share < 0.01 ? "<1 %" : `${Math.round(share * 100)} %`;
}

export function clockTime(at) {
  return new Date(at * 1000).toLocaleTimeString([], { hour12: false });
}

export function since(value) {
  if (value < 60) return `${Math.floor(value)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min`;
  if (value < 86400) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d ${Math.floor((value % 86400) / 3600)} h`;
}

export function plural(count, one, many = `${one}s`) {
  return `${figure(count)} ${count === 1 ? one : many}`;
}
