/** Bytes in the largest binary unit that leaves at least 1, with three digits. */
export function bytes(count) {
  const step = count ? Math.min(4, Math.floor(Math.log2(Math.abs(count)) / 10)) : 0;
  return `${Number((count / 1024 ** step).toPrecision(3))} ${["B", "KiB", "MiB", "GiB", "TiB"][step]}`;
}
