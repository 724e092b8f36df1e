"""What `dyno` of facebookincubator/dynolog at c3a231a sends, byte by byte, as a listener on a port received it."""

STATUS = b'\x12\x00\x00\x00{"fn":"getStatus"}'
VERSION = b'\x13\x00\x00\x00{"fn":"getVersion"}'
PAUSE = b'5\x00\x00\x00\n{\n    "fn": "dcgmProfPause",\n    "duration_s": 300\n}'
RESUME = b'\x17\x00\x00\x00{"fn":"dcgmProfResume"}'
# dyno gputrace --pids 4242 --log-file /tmp/gpu_profile_123.json --process-limit 1 --iterations 4: as Ray calls it
ITERATIONS = (
    b"n\x01\x00\x00\n{\n"
    b'    "fn": "setKinetOnDemandRequest",\n'
    b'    "config": "ACTIVITIES_LOG_FILE=/tmp/gpu_profile_123.json\\nPROFILE_START_ITERATION=0\\n'
    b"PROFILE_START_ITERATION_ROUNDUP=1\\nACTIVITIES_ITERATIONS=4\\nPROFILE_REPORT_INPUT_SHAPES=false\\n"
    b'PROFILE_WITH_STACK=false\\nPROFILE_WITH_FLOPS=false\\nPROFILE_WITH_MODULES=false",\n'
    b'    "job_id": 0,\n    "pids": [4242],\n    "process_limit": 1\n}'
)
# dyno gputrace --job-id 77 --log-file ... --duration-ms 500 --profile-start-time ...: as unitrace.py calls it
# No other process of the tests may be of job 77, since all tests of a machine see each other.
JOB = (
    b"X\x01\x00\x00\n{\n"
    b'    "fn": "setKinetOnDemandRequest",\n'
    b'    "config": "ACTIVITIES_LOG_FILE=/tmp/libkineto_trace_h.json\\nPROFILE_START_TIME=1999999999999\\n'
    b"ACTIVITIES_DURATION_MSECS=500\\nPROFILE_REPORT_INPUT_SHAPES=false\\nPROFILE_WITH_STACK=false\\n"
    b'PROFILE_WITH_FLOPS=false\\nPROFILE_WITH_MODULES=false",\n'
    b'    "job_id": 77,\n    "pids": [0],\n    "process_limit": 3\n}'
)
# dyno gputrace --log-file /tmp/m.json --profile-memory --duration-ms 200 --record-shapes --with-stacks --with-flops ...
MEMORY = (
    b"\x8c\x01\x00\x00\n{\n"
    b'    "fn": "setKinetOnDemandRequest",\n'
    b'    "config": "ACTIVITIES_LOG_FILE=/tmp/m.json\\nPROFILE_START_TIME=0\\nACTIVITIES_DURATION_MSECS=200\\n'
    b"PROFILE_REPORT_INPUT_SHAPES=true\\nPROFILE_PROFILE_MEMORY=true\\nPROFILE_MEMORY=true\\n"
    b"PROFILE_MEMORY_DURATION_MSECS=200\\nPROFILE_WITH_STACK=true\\nPROFILE_WITH_FLOPS=true\\n"
    b'PROFILE_WITH_MODULES=true",\n'
    b'    "job_id": 0,\n    "pids": [0],\n    "process_limit": 3\n}'
)
# dyno gputrace --log-file '/tmp/x"y.json': nothing is escaped, so this is not JSON
QUOTE = (
    b"=\x01\x00\x00\n{\n"
    b'    "fn": "setKinetOnDemandRequest",\n'
    b'    "config": "ACTIVITIES_LOG_FILE=/tmp/x"y.json\\nPROFILE_START_TIME=0\\nACTIVITIES_DURATION_MSECS=500\\n'
    b"PROFILE_REPORT_INPUT_SHAPES=false\\nPROFILE_WITH_STACK=false\\nPROFILE_WITH_FLOPS=false\\n"
    b'PROFILE_WITH_MODULES=false",\n'
    b'    "job_id": 0,\n    "pids": [0],\n    "process_limit": 3\n}'
)
