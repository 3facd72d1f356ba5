// The style sheet of `bifocal report`.
#pragma once

#include <string_view>

namespace bifocal {

// Colours as variables, light and dark; panels in as many columns as the page's width allows.
inline constexpr std::string_view kReportStyle = R"(
:root { color-scheme: light dark; --page: #ffffff; --ink: #1d2126; --quiet: #5c6670;
  --panel: #f6f7f9; --grid: #dfe3e8; --axis: #8a949e; --heat: #0b5cad;
  --c0: #0b5cad; --c1: #c2410c; --c2: #0f7b5a; --c3: #8b3fa8; --c4: #8a6a00; --c5: #4b5563; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --ink: #e4e7ea; --quiet: #9aa4ae;
  --panel: #1c2126; --grid: #2e353c; --axis: #6b7682; --heat: #6cb2ff;
  --c0: #6cb2ff; --c1: #ff9d66; --c2: #4fd1a1; --c3: #d59bf0; --c4: #e6c24d; --c5: #a8b3bd; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 90rem; background: var(--page);
  color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 1.8rem 0 .6rem; }
p { margin: .2rem 0; }
.quiet, .note { color: var(--quiet); }
.note { font-size: .85rem; margin: .3rem .2rem 0; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr));
  gap: .6rem; margin: 1rem 0; padding: 0; }
.facts div { background: var(--panel); border-radius: 6px; padding: .5rem .7rem; }
.facts dt { color: var(--quiet); font-size: .8rem; }
.facts dd { margin: 0; font-size: 1.05rem; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
.panels { display: grid; gap: .8rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); }
figure { margin: 0; background: var(--panel); border-radius: 6px; padding: .6rem .6rem .5rem; }
figcaption { font-weight: 600; margin: 0 .2rem .3rem; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--quiet); font: 11px system-ui, sans-serif; }
.grid { stroke: var(--grid); } .axis { stroke: var(--axis); }
.mark { stroke: var(--axis); stroke-dasharray: 3 3; }
.curve { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.curve.c0 { stroke: var(--c0); } .curve.c1 { stroke: var(--c1); } .curve.c2 { stroke: var(--c2); }
.curve.c3 { stroke: var(--c3); } .curve.c4 { stroke: var(--c4); } .curve.c5 { stroke: var(--c5); }
.dot.c0 { fill: var(--c0); } .dot.c1 { fill: var(--c1); } .dot.c2 { fill: var(--c2); }
.dot.c3 { fill: var(--c3); } .dot.c4 { fill: var(--c4); } .dot.c5 { fill: var(--c5); }
.key, .scale { font-weight: 400; font-size: .85rem; margin-left: .6rem; white-space: nowrap; }
.key::before { content: ""; display: inline-block; width: .9rem; height: .2rem;
  margin-right: .3rem; vertical-align: middle; background: currentColor; }
.key.c0 { color: var(--c0); } .key.c1 { color: var(--c1); } .key.c2 { color: var(--c2); }
.key.c3 { color: var(--c3); } .key.c4 { color: var(--c4); } .key.c5 { color: var(--c5); }
.scale { color: var(--quiet); }
.cell { fill: var(--heat); }
.ramp { display: inline-block; width: 3.5rem; height: .6rem; vertical-align: middle;
  background: linear-gradient(to right, transparent, var(--heat)); border: 1px solid var(--grid); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .8rem .2rem 0; white-space: nowrap; }
th { color: var(--quiet); font-weight: 400; font-size: .85rem; }
th:first-child, td:first-child, .words th, .words td { text-align: left; }
pre { background: var(--panel); border-radius: 6px; padding: .7rem; overflow-x: auto;
  font-size: .85rem; line-height: 1.4; }
)";

}  // namespace bifocal
