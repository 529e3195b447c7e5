// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace distmoe::tools {

/// Of the page that `distmoe report` writes: light and dark, from a phone's width on. Colours of
/// series are told apart also by the colour-blind (Okabe and Ito, lighter on dark).
inline constexpr const char* kPageStyle = R"CSS(
:root{--page:#f6f7f9;--card:#fff;--ink:#1b1f24;--muted:#57606a;--line:#d8dee4;--grid:#e6e9ed;
--warn:#9a3412;--warn-card:#fff1e6;--c0:#0072b2;--c1:#e69f00;--c2:#009e73;--c3:#cc79a7;--c4:#56b4e9;
--c5:#d55e00;--c6:#7f7f00;--c7:#8c8c8c;--c8:#6a3d9a;--c9:#b15928;color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--page:#0e1116;--card:#171b22;--ink:#e8ebef;--muted:#a3adb8;
--line:#343b45;--grid:#2a3038;--warn:#ffb37a;--warn-card:#3a2415;--c0:#4aa8e0;--c1:#f2b83b;--c2:#35c79d;
--c3:#e39ac4;--c4:#8fd0f7;--c5:#ff8a4c;--c6:#c5c54a;--c7:#a8b0b8;--c8:#b497e0;--c9:#d9926a}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI","DejaVu Sans",Roboto,Helvetica,Arial,sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .3rem}
h2{font-size:1.25rem;margin:2.4rem 0 .3rem}
h3{font-size:1rem;margin:0 0 .5rem}
p{margin:.2rem 0 .8rem;max-width:74ch}
.muted,figcaption,.note{color:var(--muted);font-size:.9rem}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px}
.tiles{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(160px,1fr));margin:1.2rem 0}
.tile b{display:block;font-size:1.5rem;line-height:1.25;font-variant-numeric:tabular-nums}
.tile span{display:block;margin-top:4px;color:var(--muted);font-size:.9rem;line-height:1.35}
.grid{display:grid;gap:16px;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr))}
.wide{display:grid;gap:16px;align-items:start;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr))}
figure{margin:0}
figure svg{display:block;width:100%;height:auto}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:7px 10px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th{color:var(--muted);font-weight:600}
th:first-child,td:first-child,th.t,td.t{text-align:left}
tr:last-child td{border-bottom:0}
.bar{display:grid;grid-template-columns:minmax(7.5rem,11.5rem) 1fr 4.6rem 3.4rem;gap:8px;align-items:center;
margin:5px 0;font-size:.9rem;font-variant-numeric:tabular-nums}
.bar i{display:block;height:15px;border-radius:3px;min-width:2px}
.track{background:var(--grid);border-radius:3px}
.bar .v{text-align:right}
.whole{display:grid;grid-template-columns:5.2rem 1fr;gap:8px;align-items:center;margin:5px 0;font-size:.9rem}
.stack{display:flex;height:20px;border-radius:4px;overflow:hidden;background:var(--grid)}
.parts{margin-top:8px;font-size:.85rem}
.parts th,.parts td{padding:3px 8px;border-bottom:0}
.dot{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:7px}
.size{margin:14px 0 2px;font-size:.9rem;font-weight:600}
.size:first-of-type{margin-top:0}
.size span{color:var(--muted);font-weight:400;margin-left:.5rem}
.stack i{display:block;height:100%}
.legend{list-style:none;margin:.2rem 0 0;padding:0;display:grid;gap:2px 16px;
grid-template-columns:repeat(auto-fill,minmax(min(100%,200px),1fr));font-size:.85rem}
.legend li{display:flex;gap:7px;align-items:baseline;font-variant-numeric:tabular-nums}
.legend li i{flex:none;width:11px;height:11px;border-radius:3px}
.legend li b{margin-left:auto;font-weight:600}
.badge{display:inline-block;background:var(--warn-card);color:var(--warn);border:1px solid var(--warn);
border-radius:99px;padding:0 8px;font-size:.78rem;font-weight:600}
.wrong{font-weight:700;border-width:2px}
h2.machine{font-size:1.45rem;margin-top:3.4rem;padding-top:1rem;border-top:2px solid var(--line);overflow-wrap:anywhere}
code,pre{font:.85rem/1.45 ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.3rem 0}
details{margin:.8rem 0}
summary{cursor:pointer;color:var(--muted)}
.c0{background:var(--c0)}.c1{background:var(--c1)}.c2{background:var(--c2)}.c3{background:var(--c3)}
.c4{background:var(--c4)}.c5{background:var(--c5)}.c6{background:var(--c6)}.c7{background:var(--c7)}
.c8{background:var(--c8)}.c9{background:var(--c9)}
@media (max-width:560px){main{padding:18px 12px 40px}h1{font-size:1.4rem}.card{padding:12px}
.bar{grid-template-columns:6.2rem 1fr 3.9rem 2.9rem;gap:6px;font-size:.85rem}}
)CSS";

}  // namespace distmoe::tools
