"""How the report looks: light or dark as the reader's system asks, readable from a phone to a projector."""

CSS = """
:root { color-scheme: light dark;
  --page:#f6f7f9; --card:#fff; --ink:#1b1f24; --soft:#5b6570; --line:#dde1e6; --link:#0a5fb4;
  --ok:#0b7a53; --ok-card:#e9f6f0; --slow:#8a5a00; --slow-card:#fdf3dc; --failed:#b3261e; --failed-card:#fdecea; }
@media (prefers-color-scheme: dark) { :root {
  --page:#14171b; --card:#1d2126; --ink:#e7eaee; --soft:#9aa5b1; --line:#333a42; --link:#7db7f2;
  --ok:#5fd0a2; --ok-card:#17322a; --slow:#f0bd5c; --slow-card:#362b14; --failed:#ff8d84; --failed-card:#3d1f1d; } }
* { box-sizing:border-box }
body { margin:0; background:var(--page); color:var(--ink);
  font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif }
main { max-width:1440px; margin:0 auto; padding:24px 20px 64px }
a { color:var(--link) }
h2 { font-size:1.15rem; margin:32px 0 10px }
h3 { font-size:1rem; margin:0 0 6px }
header { background:var(--card); border:1px solid var(--line); border-left:10px solid; border-radius:10px;
  padding:18px 22px }
header h1 { font-size:1.9rem; line-height:1.2; margin:2px 0 6px }
header p { margin:0; color:var(--soft) }
header .course { font-weight:600; letter-spacing:.02em }
header.ready { border-left-color:var(--ok) } header.ready h1 { color:var(--ok) }
header.warned { border-left-color:var(--slow) } header.warned h1 { color:var(--slow) }
header.broken { border-left-color:var(--failed) } header.broken h1 { color:var(--failed) }
.notices { margin-top:14px }
.notices p { margin:6px 0; padding:8px 12px; background:var(--slow-card); border-radius:8px }
.tag { color:var(--slow); font-weight:700; margin-right:6px }
.scroll { overflow-x:auto }
table { border-collapse:separate; border-spacing:0; width:100%; background:var(--card);
  border:1px solid var(--line); border-radius:10px; overflow:hidden }
th,td { text-align:left; padding:9px 12px; border-top:1px solid var(--line); vertical-align:top }
thead th { border-top:0; color:var(--soft); font-weight:600; font-size:.86rem; white-space:nowrap }
.lessons tbody th { white-space:nowrap; font-weight:600 }
.lessons td { min-width:118px }
.lessons td b { font-weight:700 }
.time { float:right; font-variant-numeric:tabular-nums }
td.ok b { color:var(--ok) } td.slow b { color:var(--slow) } td.failed b { color:var(--failed) }
td.slow { background:var(--slow-card) } td.failed { background:var(--failed-card) }
td.none { color:var(--soft) }
td small { color:var(--soft); font-variant-numeric:tabular-nums; white-space:nowrap }
.bar { height:5px; background:var(--line); border-radius:3px; margin:5px 0 3px; overflow:hidden }
.bar i { display:block; height:100%; background:currentColor; border-radius:3px }
td.ok .bar { color:var(--ok) } td.slow .bar { color:var(--slow) } td.failed .bar { color:var(--failed) }
.key { color:var(--soft); font-size:.86rem; margin:8px 2px }
article { background:var(--card); border:1px solid var(--line); border-left:6px solid var(--failed); border-radius:10px;
  padding:14px 18px; margin:0 0 12px }
.first { margin:0 0 8px; font-family:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace; font-size:.92rem;
  overflow-wrap:anywhere }
.rank { border:2px solid; border-radius:6px; padding:0 7px; font-weight:700; white-space:nowrap }
.again { margin:6px 0 0; color:var(--soft); font-size:.88rem; overflow-wrap:anywhere }
code,pre { font-family:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace; font-size:.86rem }
pre { background:var(--page); border:1px solid var(--line); border-radius:8px; padding:12px; overflow-x:auto;
  max-height:26rem; margin:8px 0 0 }
summary { cursor:pointer; color:var(--link) }
.facts th { width:9.5rem; color:var(--soft); font-weight:600 }
.facts td { overflow-wrap:anywhere }
.facts tr:first-child > * { border-top:0 }
@media print { main { max-width:none } pre { max-height:none } }
"""
