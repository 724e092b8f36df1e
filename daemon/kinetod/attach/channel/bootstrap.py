"""The code that a method makes the target run: it opens the private channel and runs what comes over it.

Theory of operation
    It runs on a native thread that python_stub.c has made, with globals of its own in which it finds sys.modules: not
    on any thread of the program, and not in its `__main__`. It claims the token, makes the socket pair and the memfd
    whose name tells which end is the daemon's, waits at most CHANNEL_WAIT_S for one packet, closes the daemon's end
    and the memfd, and executes the packet: the loader of `kineto_agent.bootstrap.loader`, which is given the channel
    and
    the descriptors that came along. The loader's answer, if it is one, is the agent's own work, done on this thread.

    `sys._kineto_attach` is all that stays: the last token, so that a bootstrap which comes late or twice does
    nothing, and what the loader keeps for the next attach. "open" there is what a child forked meanwhile must close;
    one fork hook for the life of the process does so, and has `native` mend the dynamic loader's state, which a child
    finds inconsistent if it was forked while our thread opened a library. "ours" there says whether a message of
    DeprecationWarning is one that a fork gives because of our threads alone: see kineto_agent.system.fork_warnings,
    which takes over as soon as it is there. Until then two threads beside the program's first one may be ours, and a
    third one of its own.

    A program may close descriptors that it did not open, and use their numbers anew. os.socketpair and the like give
    the GIL away and have it back up to 5 ms later: by then their numbers may be the program's. So descriptors are made,
    looked at (device and inode), received and closed by system calls that keep the GIL (`syscall` through _ctypes), in
    a turn with it that has just begun: Python code of the program cannot come in between. And each is moved, by
    F_DUPFD, to the high end of the table, where a program that opens as many as it has closed does not come: the lowest
    numbers are given first. Waiting and reading is done with such a number alone; at worst it is closed.

    No import statement: builtins.__import__ may be the program's, and so may a module of that name in its folder.
    What is needed are modules that every interpreter has imported since its start, and _socket and _ctypes, which are
    taken from where the interpreter has its own: `native` (opening_stub.c) opens them without the GIL. For the same
    reason dlopen, dlsym and syscall are given by their addresses. `own` makes an extension module once in a process.
"""

import re

from kinetod.attach.attach_types import MAX_BOOTSTRAP_BYTES, Bootstrap

LACKING = "standard library: no "  # and a module that it should have
CHANNEL_WAIT_S = 10  # for the daemon to find the channel and send the agent; then it is closed

AT_THE_END = 24  # so many numbers at the end of the table of descriptors are for us
FIRST_NUMBER = 64 - AT_THE_END  # of the smallest table

# Calls by number: socketpair, fcntl, fstat, memfd_create, recvmsg and close. 0x80005 is SOCK_SEQPACKET | SOCK_CLOEXEC,
# 1030 F_DUPFD_CLOEXEC, 2 MSG_PEEK, 0x40000040 MSG_CMSG_CLOEXEC | MSG_DONTWAIT, 5 FUNCFLAG_CDECL | FUNCFLAG_PYTHONAPI,
# 0x1000000 CO_FUTURE_ANNOTATIONS.
_SOURCE = """\
__name__='kineto_boot'
def boot(k):
 y,p,F,X=[modules[n]for n in('sys','posix','_frozen_importlib','_frozen_importlib_external')]
 B,E=F.BuiltinImporter,X.ExtensionFileLoader
 def own(c):
  S=c.name;f=c.origin
  if S in s:return s[S]
  N=native(f.encode('utf8','surrogateescape'),'PyInit_'+S,0,0,0,c,S,f,{})
  if not N:raise ImportError(f)
  F._init_module_attrs(c,N)
  s[S]=N
  return N
 def ext(S):
  h=modules.get(S)
  l=getattr(h,'__loader__',0)
  if l is B or type(l)is E:return h
  c=B.find_spec(S)
  if c:
   N=F.module_from_spec(c)
   c.loader.exec_module(N)
   if h:modules[S]=h
   else:modules.pop(S,h)
   return N
  for d in['%s/%s/python%d.%d/lib-dynload'%(y.base_exec_prefix,y.platlibdir,*y.version_info[:2])]+y.path:
   for e in X.EXTENSION_SUFFIXES:
    f='%s/%s'%(d,S+e)
    if d.endswith('/lib-dynload')and X._path_isfile(f):return own(X.spec_from_file_location(S,f,loader=E(S,f)))
  raise ImportError('LACKING'+S)
 s=y.__dict__.setdefault('_kineto_attach',{'tokens':{},'open':[]})
 n=s['tokens'];m=object()
 if n.setdefault(k,m)is not m or max(list(n))>k:return
 for x in list(n):
  if x<k:n.pop(x,m)
 if y.version_info>(3,12)and'ours'not in s:
  s['ours']=lambda m:'use of fork'in m and p.stat('/proc/self/task').st_nlink<6
  class Q:match=lambda q,m:s['ours'](m)and not G()
  Q='ignore',Q(),Warning,None,0
  r=ext('itertools').repeat
  f=lambda:map(getattr,map(modules.get,r('warnings'),r(modules['_warnings'])),map(s.get,r('in'),r('')),r([]))
  l=lambda g:map(list.__init__,f(),map(g,map(list,map(filter,r(Q.__ne__),f())))).__next__
  G=s['out']=l(list)
  p.register_at_fork(before=l([Q].__add__),after_in_child=G)
 s['in']='filters'
 T,N=ext('_ctypes'),ext('_socket')
 class L(T._SimpleCData):_type_='l'
 class C(T.CFuncPtr):_flags_=5;_restype_=L
 C=C(syscall)
 W,D,Z,M,R,O=(53,72,5,319,47,3)if p.uname()[4]=='x86_64'else(199,25,80,279,212,57)
 o=s['open']
 fresh=lambda:p.stat('/')
 def same(x):
  q=bytes(144)
  return C(Z,x,q)==0 and q[:16]
 def up(x):
  i=same(x);u=C(D,x,1030,HIGH)
  if u<0:return x
  if same(x)==i:C(O,x)
  return u
 class Held:
  def __init__(h,x):h.x=x;h.i=same(x);o.append(h)
  def close(h):
   if h in o:o.remove(h)
   x,h.x=h.x,None
   if x is None:return
   if type(x)is not int:x=x.detach()
   fresh()
   if same(x)==h.i:C(O,x)
 def close(*a):
  a or native(b'',None,0,0,0)
  for h in a or o[:]:h.close()
 if 'fork' not in s:
  s['fork']=1
  p.register_at_fork(after_in_child=close)
 fresh()
 q=bytes(8)
 if C(W,1,0x80005,0,q):raise OSError('socketpair')
 r,v=[Held(up(x))for x in memoryview(q).cast('i')]
 f=Held(up(C(M,b'kineto-%d-%d'%(k,v.x),1)))
 d=[]
 try:
  a=r.x=N.socket(1,5,0,r.x)
  try:
   a.settimeout(WAIT)
   a.recv(1,2)
   g,e=bytes(65536),bytes(64)
   P=bytes.__basicsize__-1
   n=lambda*x:b''.join(x.to_bytes(8,'little')for x in x)
   j=n(id(g)+P,65536)
   j=n(0,0,id(j)+P,1,id(e)+P,64,0),j
   fresh()
   if same(a.fileno())!=r.i:return close(r)
   g=g[:C(R,a.fileno(),j[0],0x40000040)]
   d=[Held(up(x))for x in memoryview(e[16:e[0]]).cast('i')]
  finally:close(v,f)
  n={**globals(),'__name__':'kineto_loader','own':own,'high':HIGH}
  exec(compile(g,'<kineto-loader>','exec',0x1000000),n)
  return n['load'](s,a,[h.x for h in d])
 except BaseException as x:
  try:
   if same(a.fileno())==r.i:a.send(b'E'+repr(x).encode()[:500])
  except Exception:pass
  close(r,*d)
work=boot(TOKEN)
if work:work()
"""


def make(token: int, first_number: int = FIRST_NUMBER) -> Bootstrap:
    """The bootstrap of one attach. token: greater than that of any attach before (Unix ns). first_number: ours are
    from there on where the limit allows it.
    """
    words = {"TOKEN": token, "WAIT": CHANNEL_WAIT_S, "HIGH": first_number, "LACKING": LACKING}
    source = re.sub("|".join(words), lambda word: str(words[word[0]]), _SOURCE).encode("ascii")
    assert len(source) <= MAX_BOOTSTRAP_BYTES, len(source)
    return Bootstrap(token, source)
