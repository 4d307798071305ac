"""The same report for machines: JUnit's XML, one test case per run and one per lesson for the metrics."""

import re
from xml.etree import ElementTree as ET

# characters that XML 1.0 cannot hold, which logs have
FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_junit(path, results, facts):
    """`results`: LessonResults; `facts`: name -> text, written as properties."""
    cases = []
    for result in results:
        for outcome in result.outcomes:
            case = _case(result.lesson.name, outcome.run.title, outcome.ended.seconds)
            if not outcome.ok:
                failure = ET.SubElement(case, "failure", message=_clean(str(outcome.error)))
                failure.text = _clean(outcome.error.detail)
            cases.append(case)
        if result.compared:
            case = _case(result.lesson.name, "metrics agree", 0)
            if result.differences:
                failure = ET.SubElement(case, "failure", message=_clean(result.differences[0]))
                failure.text = _clean("\n".join(result.differences))
            cases.append(case)
        case = _case(result.lesson.name, "notebook and script hold the same cells", 0)
        if result.stale:
            ET.SubElement(case, "failure", message=_clean(result.stale))
        cases.append(case)
    failures = sum(case.find("failure") is not None for case in cases)
    seconds = sum(float(case.get("time")) for case in cases)
    suite = ET.Element("testsuite", name="preflight", tests=str(len(cases)), failures=str(failures), errors="0",
                       skipped="0", time=f"{seconds:.3f}")  # fmt: skip
    properties = ET.SubElement(suite, "properties")
    for name, value in facts.items():
        ET.SubElement(properties, "property", name=name, value=_clean(str(value)))
    suite.extend(cases)
    tree = ET.ElementTree(suite)
    ET.indent(tree)
    tree.write(path, encoding="utf-8", xml_declaration=True)


def _case(lesson, name, seconds):
    return ET.Element("testcase", classname=lesson, name=name, time=f"{seconds:.3f}")


def _clean(text):
    return FORBIDDEN.sub("", text)
