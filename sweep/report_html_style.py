"""The look of the HTML report: light and dark, on a phone, and on paper."""

from __future__ import annotations

STYLE = """
:root { --text: #1d2125; --quiet: #5b6570; --page: #ffffff; --card: #f4f6f8; --line: #d5dbe1; --bar: #8fa3b5;
  --accept: #1a7f4b; --tune: #9a6700; --reject: #b3261e; --link: #0b5cad; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ec; --quiet: #a0abb6; --page: #14181c; --card: #1f252b;
  --line: #38424c; --bar: #64798c; --accept: #4cc38a; --tune: #e0b252; --reject: #f2837b; --link: #7db8f0; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1rem 1rem 3rem; }
h1 { font-size: 1.5rem; margin: 1.2rem 0 .6rem; overflow-wrap: anywhere; }
h3 { font-size: 1.15rem; margin: 2rem 0 .4rem; padding-top: .6rem; border-top: 1px solid var(--line); }
p, li, dd { overflow-wrap: anywhere; }
ul { padding-left: 1.2rem; }
.quiet, figcaption, dt { color: var(--quiet); font-size: .9rem; }
.title { font-weight: 600; margin: 1rem 0 .2rem; }
code { background: var(--card); padding: .1em .3em; border-radius: 4px; font-size: .88em; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem .8rem; }
dd { margin: 0; }
.summary { background: var(--card); border-left: 6px solid var(--line); border-radius: 6px; padding: .8rem 1rem; }
.summary.accept { border-color: var(--accept); } .summary.tune { border-color: var(--tune); }
.summary.reject { border-color: var(--reject); }
.verdict { margin: 0 0 .7rem; font-size: 1.1rem; overflow-wrap: anywhere; }
.badge { text-transform: uppercase; font-size: .75rem; font-weight: 700; letter-spacing: .05em; padding: .2em .6em;
  border-radius: 1em; border: 1.5px solid currentColor; }
.accept .badge { color: var(--accept); } .tune .badge { color: var(--tune); } .reject .badge { color: var(--reject); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .8rem; }
.tile { display: flex; flex-direction: column; overflow-wrap: anywhere; }
.tile .label { font-size: .85rem; color: var(--quiet); } .tile .value { font-size: 1.5rem; font-weight: 650; }
.bars { margin-top: 1rem; }
.row { display: grid; grid-template-columns: minmax(6rem, 14rem) 1fr minmax(8.5rem, max-content); gap: .6rem;
  align-items: center; padding: .15rem 0; font-size: .9rem; }
.name { overflow-wrap: anywhere; } .number { font-variant-numeric: tabular-nums; }
.number em { color: var(--quiet); font-style: normal; }
.track { position: relative; height: 1rem; background: var(--page); border: 1px solid var(--line); border-radius: 3px; }
.track b { display: block; height: 100%; background: var(--bar); border-radius: 2px; }
.track b.preferred { background: var(--accept); } .track b.reject { opacity: .55; } .track b.tune { opacity: .75; }
.track i { position: absolute; top: -3px; bottom: -3px; width: 0; border-left: 2px dashed var(--reject); }
.wide { overflow-x: auto; margin: .4rem 0; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { font-weight: 600; color: var(--quiet); }
td[style*="right"] { white-space: nowrap; } td:not([style]) { min-width: 7rem; }
td:first-child { min-width: 11rem; max-width: 22rem; overflow-wrap: anywhere; }
details { margin: .8rem 0; } summary { cursor: pointer; color: var(--link); }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; background: #fff; border-radius: 6px; display: block; }
@media (max-width: 34rem) {
  body { font-size: 15px; }
  .row { grid-template-columns: 1fr max-content; } .row .track { grid-column: 1 / -1; grid-row: 2; }
  dl { display: block; } dd { margin: 0 0 .6rem; }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); } .tile .value { font-size: 1.25rem; }
  td:first-child { min-width: 7rem; } th, td { padding: .3rem .4rem; }
}
@media print {
  :root { --text: #000; --quiet: #444; --page: #fff; --card: #fff; --line: #bbb; --bar: #999; --accept: #1a7f4b;
    --tune: #9a6700; --reject: #b3261e; --link: #000; }
  body { font-size: 10pt; } main { max-width: none; padding: 0; }
  .summary, .track, .track b { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  figure, tr, .tile { break-inside: avoid; } h1, h3, .title { break-after: avoid; }
  .wide { overflow: visible; } table { font-size: 7.5pt; } th, td { padding: .15rem .35rem; }
  details::details-content { content-visibility: visible; height: auto; }
}
"""
